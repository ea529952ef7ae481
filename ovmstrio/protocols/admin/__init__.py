"""Administration over REST: configuration, reload, changes of services and profiles."""
