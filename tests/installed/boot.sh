#!/bin/bash
# Boots this machine's own systemd as process 1 of fresh namespaces, and runs a script under it.
#
#   boot.sh FOLDER        runs FOLDER/script with bash; FOLDER is /run/given in there, what it prints goes to FOLDER/output
#
# The root file system is an overlay of the machine's over memory: whatever is installed or enabled in there is gone
# afterwards, and nothing is ever written to the machine's own. Exits as the script does, or with 77 when this machine
# does not allow such a thing; then the reason is the last line on standard error.
set -euo pipefail

cannot() { echo "$*" >&2; exit 77; }

if [[ $1 != --inside ]]; then
    FOLDER=$(realpath "$1")
    [[ $(id -u) == 0 ]] || cannot "namespaces of one's own need root"
    [[ -x /lib/systemd/systemd ]] || cannot "systemd is not installed"
    groups=$(awk '$3 == "cgroup2" { print $2; exit }' /proc/mounts)
    [[ -n $groups ]] || cannot "no cgroup2 file system is mounted"
    unshare --mount --uts --ipc --net --cgroup --pid --fork true 2>/dev/null || cannot "namespaces are not allowed here"
    # A control group of its own, which is the root of them all for the systemd in there.
    group=$groups/llmd-installed-$$
    mkdir "$group" 2>/dev/null || cannot "control groups cannot be made here"
    clean_up() {
        # All processes have ended with process 1; only their empty groups are left.
        for _ in {1..100}; do
            find "$group" -depth -type d -exec rmdir {} + 2>/dev/null
            [[ -d $group ]] || return 0
            sleep 0.02
        done
        echo "cannot remove $group" >&2
    }
    trap clean_up EXIT
    : >"$FOLDER/output"
    code=0
    (
        echo $BASHPID >"$group/cgroup.procs" || cannot "processes cannot be moved into a control group here"
        exec unshare --mount --propagation private --uts --ipc --net --cgroup --pid --fork --kill-child=KILL \
            bash "$(realpath "$0")" --inside "$FOLDER" </dev/null
    ) || code=$?
    exit $code
fi

FOLDER=$2
# The mount namespace is ours alone: what is mounted here is seen by nobody outside.
top=/mnt
{
    mount -t tmpfs -o mode=755 tmpfs $top
    mkdir $top/upper $top/work $top/root
    mount -t overlay -o "lowerdir=/,upperdir=$top/upper,workdir=$top/work" overlay $top/root
} 2>/dev/null || cannot "the root file system cannot be overlaid here"
root=$top/root

mount -t proc -o nosuid,nodev,noexec proc $root/proc
mount --bind $root/proc/sys $root/proc/sys
mount -o remount,bind,ro $root/proc/sys # those are the machine's
mount -t sysfs -o ro,nosuid,nodev,noexec sysfs $root/sys
mount -t cgroup2 -o nosuid,nodev,noexec cgroup2 $root/sys/fs/cgroup
mount -t tmpfs -o mode=755,nosuid tmpfs $root/dev
for node in null zero full random urandom tty; do
    : >$root/dev/$node
    mount --bind /dev/$node $root/dev/$node
done
mkdir $root/dev/shm $root/dev/pts
mount -t devpts -o newinstance,ptmxmode=0666,mode=620,nosuid,noexec devpts $root/dev/pts
ln -s pts/ptmx $root/dev/ptmx # PrivateDevices= asks for it
ln -s /proc/self/fd $root/dev/fd
mount -t tmpfs -o mode=1777,nosuid,nodev tmpfs $root/dev/shm
mount -t tmpfs -o mode=755,nosuid,nodev tmpfs $root/run
mount -t tmpfs -o mode=1777,nosuid,nodev tmpfs $root/tmp
mkdir $root/run/given
mount --bind "$FOLDER" $root/run/given

# Nothing of what the machine starts, only what a service stands on: sysinit.target, empty, and journald.
units=$root/etc/systemd/system
rm -rf "$units"/*.wants "$units"/*.requires
mkdir -p "$units/sysinit.target.wants"
for unit in $root/lib/systemd/system/sysinit.target.wants/*; do
    ln -s /dev/null "$units/sysinit.target.wants/${unit##*/}"
done
: >$root/etc/fstab
rm -f $root/etc/machine-id
tr -d - </proc/sys/kernel/random/uuid >$root/etc/machine-id
mkdir -p $root/etc/systemd/journald.conf.d
printf '[Journal]\nStorage=volatile\nReadKMsg=no\nAudit=no\nRateLimitBurst=0\n' >$root/etc/systemd/journald.conf.d/given.conf
cat >"$units/given.service" <<'UNIT'
[Unit]
Description=The script that was given
DefaultDependencies=no
Requires=systemd-journald.service systemd-journald.socket
After=systemd-journald.service
SuccessAction=exit-force
FailureAction=exit-force
[Service]
Type=oneshot
Environment=LANG=C.UTF-8 SYSTEMD_PAGER= SYSTEMD_COLORS=0
WorkingDirectory=/run/given
ExecStart=/bin/bash script
StandardOutput=append:/run/given/output
StandardError=append:/run/given/output
TimeoutStartSec=60
UNIT

cd $root
mkdir -p mnt/.old
pivot_root . mnt/.old
umount -l mnt/.old
# systemd leaves this to whoever starts it in a container; its own sandboxes build on it.
mount --make-rshared /
exec env -i container=llmd-test PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 \
    setpriv --bounding-set=-sys_module,-sys_rawio,-sys_time,-syslog \
    /lib/systemd/systemd --unit=given.service --show-status=0 --log-level=notice --log-target=journal
