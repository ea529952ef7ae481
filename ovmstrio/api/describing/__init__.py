"""What the server tells of itself: a document for programs and a page for people, made of what is loaded."""
