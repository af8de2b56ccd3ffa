"""How rows move between ranks: the Wire contract and what implements it."""
