"""The commands of the command line, one file for each family; what they need is imported when they are called."""
