"""EAGLE, HASS and EAGLE-3: a head of one decoder layer that continues the policy's own hidden states."""
