"""One backend a file: how graphs are captured on one kind of device."""
