"""Where fusedops meets other libraries. Each module needs its library, and is imported only where that is in use."""
