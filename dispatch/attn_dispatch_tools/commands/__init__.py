"""The commands that fit one file each: info, explain, tune, plan and completion."""
