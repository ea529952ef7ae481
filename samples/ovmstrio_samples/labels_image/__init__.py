"""Labels once, then pictures: a graph whose inputs need not come together."""
