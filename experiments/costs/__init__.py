"""What do true costs change?"""
