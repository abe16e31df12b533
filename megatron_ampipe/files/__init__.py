"""Reading and writing files: safely, whole, with the line of what is wrong."""
