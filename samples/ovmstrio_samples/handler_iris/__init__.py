"""A handler: a classifier in several versions, over plain HTTP."""
