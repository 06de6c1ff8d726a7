"""Processes of our own on this host: started fresh, talked to over a socket, gone when their parent is."""
