"""What commands print. A view is imported by its command only when it is needed."""
