"""Where environments run: in this process, in killable workers, later behind a server."""
