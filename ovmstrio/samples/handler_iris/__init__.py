"""Sample handler_iris: a classifier in several versions, over plain HTTP."""
