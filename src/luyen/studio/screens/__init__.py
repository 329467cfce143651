"""What the screens of the studio show, as plain data read from run directories."""
