"""What calls run on: a device, here or planned for, and what an implementation for it must be."""
