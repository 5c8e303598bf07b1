"""The whole attention step of several layers, as the server captures it."""
