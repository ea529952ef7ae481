"""A handler: classifiers of scikit-learn in several versions."""
