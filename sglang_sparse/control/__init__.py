"""What can change while a server runs: for all requests over HTTP, and for one request with its `custom_params`."""
