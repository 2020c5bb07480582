"""The commands, one thin file each, imported when the command is used."""
