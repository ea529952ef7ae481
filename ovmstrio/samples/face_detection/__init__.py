"""Sample face_detection: faces and their landmarks in a picture."""
