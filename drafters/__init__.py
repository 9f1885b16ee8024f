"""Everything that proposes tokens. The engine works without it; nothing in here can make a wrong token."""
