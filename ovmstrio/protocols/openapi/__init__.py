"""The OpenAPI document of the REST interface and the page that shows it."""
