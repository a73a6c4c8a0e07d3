"""The page on which one drives: its server, the sessions of its pages, and the page itself."""
