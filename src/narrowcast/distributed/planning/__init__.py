"""Which codec pays on which link."""
