"""The smallest model: adds one to whatever comes."""
