"""Sample handler_sklearn: scikit-learn classifiers in several versions."""
