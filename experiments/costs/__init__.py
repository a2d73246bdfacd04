"""What do schedules gain that are made for the costs of their stages?"""
