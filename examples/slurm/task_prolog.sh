#!/bin/sh
# TaskProlog of slurm.conf: lets a task see only the cards that --gres gave its job on this node (SLURM_JOB_GPUS: numbers of
# /dev/accel/accelN), where no cgroup does it. Slurm takes the line that this prints into the task's environment.
cards=${SLURM_STEP_GPUS:-${SLURM_JOB_GPUS:-}}
[ "$cards" ] || exit 0
# The batch script has run it before, perhaps on another node.
HABANA_VISIBLE_MODULES='' ucx-gaudi info --json | awk -v cards=",$cards," -F '[ :,]+' '
    /"node"/ { node = $3 }
    /"module_id"/ && index(cards, "," node ",") { modules = modules "," $3 }
    END { if (modules) print "export HABANA_VISIBLE_MODULES=" substr(modules, 2) }'
