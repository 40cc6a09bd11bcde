"""The commands that are one file each: info, explain, tune, plan and completion."""
