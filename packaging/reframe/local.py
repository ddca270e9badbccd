# ReFrame's settings for one machine without a scheduler, whose ranks mpirun starts:
#   reframe -C local.py -c weft.py -r --performance-report
# A site has settings of its own, with srun or its scheduler; weft.py works with any of them.
site_configuration = {
    'systems': [{
        'name': 'local',
        'descr': 'this machine',
        'hostnames': ['.*'],
        'partitions': [{
            'name': 'default',
            'scheduler': 'local',
            'launcher': 'mpirun',
            'environs': ['default'],
            'max_jobs': 1,  # a test has all cores to itself
        }],
    }],
    'environments': [{'name': 'default'}],
}
