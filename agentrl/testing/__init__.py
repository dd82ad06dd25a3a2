"""Scripted engines, tiny models and builders: shipped, so that tests need no mocks."""
