"""``POST /{name}/{method}``: the HTTP way into Paddle Serving's pipelines."""
