"""The studio in the browser: an HTTP server over a folder of runs, and the page it serves."""
