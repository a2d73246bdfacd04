"""What does a step cost when several processes run it, as several hosts would?"""
