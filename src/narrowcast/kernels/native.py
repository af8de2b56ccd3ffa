def load(isa):
    return None, "stub"
