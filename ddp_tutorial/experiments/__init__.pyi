from .execute import read_parameters as read_parameters
