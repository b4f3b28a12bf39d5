"""Runs the builds of the CPU kernels that this machine's processor cannot execute, in an emulator: `make emulate`.

Bochs emulates a Sapphire Rapids Xeon, whose AVX-512 and AMX the kernels are compiled for. Bochs 3.0 lacks what Linux
wants before it gives AMX to a process, so nothing runs underneath: boot.S switches the processor on, driver.cpp calls
each build's ops over odd shapes and compares with the portable build's results, and the report leaves by the serial
port. It says whether results are right; an emulator's speed says nothing about a processor's.

On Debian: apt-get install bochs bochs-term xorriso isolinux syslinux-common g++. Where Bochs is too old (before 3.0),
unpack the packages of a newer release with all they depend on (dpkg -x) into a folder and name it: ARGS="--root DIR".
"""
