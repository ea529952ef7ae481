"""Sample labels_image: a graph with incomplete inputs, labels once and then pictures."""
