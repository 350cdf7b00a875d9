# filled in by the packaging step
