"""Devices that calls run on or are planned for, and the interface of implementations."""
