def prepare():
    pass
