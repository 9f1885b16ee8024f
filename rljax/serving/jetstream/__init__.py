"""The decode engine under the interfaces of Google JetStream."""
