"""Managers from the papers that no measured workload prefers to the default one."""
