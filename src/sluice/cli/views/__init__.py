"""Output of commands. A command imports a view with tables only when it prints them."""
