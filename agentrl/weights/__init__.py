"""Bringing new weights to engines: transports, one file each, and the publisher that proves the result."""
