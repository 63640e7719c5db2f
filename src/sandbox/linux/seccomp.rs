//! The system call filters of every program in a sandbox.
//!
//! A list of what is denied, with `EPERM`; everything else is allowed, since harnesses bring programs of
//! every kind. `clone3` and the x32 calls answer `ENOSYS`, because a filter cannot see their arguments or
//! numbers: the C library then falls back to calls that it can see.

use std::collections::BTreeMap;

use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, sock_filter,
};

use super::wire::Isolation;

/// Calls that change what the sandbox is made of, look into other processes, or have a long record of
/// kernel holes and no use in a build or a test.
const DENIED: &[i64] = &[
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_move_mount,
    libc::SYS_open_tree,
    libc::SYS_fsopen,
    libc::SYS_fsmount,
    libc::SYS_fsconfig,
    libc::SYS_fspick,
    libc::SYS_mount_setattr,
    libc::SYS_unshare,
    libc::SYS_setns,
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_process_madvise,
    libc::SYS_pidfd_getfd,
    libc::SYS_kcmp,
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_keyctl,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_userfaultfd,
    libc::SYS_fanotify_init,
    libc::SYS_open_by_handle_at,
    libc::SYS_quotactl,
    libc::SYS_acct,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_reboot,
    libc::SYS_syslog,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_clock_adjtime,
    libc::SYS_adjtimex,
    libc::SYS_kexec_load,
    libc::SYS_kexec_file_load,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_vhangup,
];

/// Socket families inside a sandbox with an own network. Others (vsock among them) are not bound to it.
const FAMILIES: &[i32] = &[libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK];

/// libc's constant is deprecated, the type is still there.
const SOCK_PACKET: i32 = 10;

/// The flag of `send` calls that connects.
const FAST_OPEN: u64 = libc::MSG_FASTOPEN as u64;

/// The kernel's mask of the socket type without its flags.
const SOCKET_TYPE_MASK: u64 = 0xf;

/// The filters, in the order in which they are applied.
///
/// # Errors
/// An architecture that the filter compiler does not know.
pub fn filters(isolation: &Isolation) -> Result<Vec<BpfProgram>, BackendError> {
    let mut denied: BTreeMap<i64, Vec<SeccompRule>> = DENIED.iter().map(|&call| (call, Vec::new())).collect();
    let new_user = libc::CLONE_NEWUSER as u64;
    denied.insert(libc::SYS_clone, vec![rule(&[(0, SeccompCmpOp::MaskedEq(new_user), new_user)])?]);
    let terminal_input =
        [libc::TIOCSTI, libc::TIOCLINUX].map(|request| rule(&[(1, SeccompCmpOp::Eq, request)]));
    denied.insert(libc::SYS_ioctl, terminal_input.into_iter().collect::<Result<_, _>>()?);
    denied.insert(libc::SYS_socket, socket_rules(isolation)?);
    if *isolation == Isolation::Weak {
        // TCP Fast Open connects while it sends, past the call at which Landlock looks at the port.
        for (call, flags) in [(libc::SYS_sendto, 3), (libc::SYS_sendmsg, 2), (libc::SYS_sendmmsg, 3)] {
            denied.insert(call, vec![rule(&[(flags, SeccompCmpOp::MaskedEq(FAST_OPEN), FAST_OPEN)])?]);
        }
    }

    let mut programs = vec![
        compile(denied, libc::EPERM)?,
        compile(BTreeMap::from([(libc::SYS_clone3, Vec::new())]), libc::ENOSYS)?,
    ];
    if cfg!(target_arch = "x86_64") {
        programs.push(refuse_x32());
    }
    Ok(programs)
}

/// Which `socket` calls are denied.
fn socket_rules(isolation: &Isolation) -> Result<Vec<SeccompRule>, BackendError> {
    match isolation {
        Isolation::Namespaces { .. } => {
            let other: Vec<_> = FAMILIES.iter().map(|&family| (0, SeccompCmpOp::Ne, family as u64)).collect();
            Ok(vec![rule(&other)?])
        }
        // The host's network is in reach: TCP only, which Landlock then holds to one port.
        Isolation::Weak => Ok(vec![
            rule(&[
                (0, SeccompCmpOp::Ne, libc::AF_INET as u64),
                (0, SeccompCmpOp::Ne, libc::AF_INET6 as u64),
            ])?,
            no_type(libc::SOCK_DGRAM)?,
            no_type(libc::SOCK_RAW)?,
            no_type(libc::SOCK_RDM)?,
            no_type(libc::SOCK_SEQPACKET)?,
            no_type(libc::SOCK_DCCP)?,
            no_type(SOCK_PACKET)?,
            // Other protocols have streams too (MPTCP, SCTP), and Landlock knows TCP alone.
            rule(&[
                (2, SeccompCmpOp::Ne, libc::IPPROTO_IP as u64),
                (2, SeccompCmpOp::Ne, libc::IPPROTO_TCP as u64),
            ])?,
        ]),
    }
}

/// No socket of this type.
fn no_type(kind: i32) -> Result<SeccompRule, BackendError> {
    rule(&[(1, SeccompCmpOp::MaskedEq(SOCKET_TYPE_MASK), kind as u64)])
}

/// A rule that matches if all conditions on 32-bit arguments hold.
fn rule(conditions: &[(u8, SeccompCmpOp, u64)]) -> Result<SeccompRule, BackendError> {
    let conditions = conditions
        .iter()
        .map(|(argument, operator, value)| {
            SeccompCondition::new(*argument, SeccompCmpArgLen::Dword, operator.clone(), *value)
        })
        .collect::<Result<Vec<_>, _>>()?;
    SeccompRule::new(conditions)
}

fn compile(rules: BTreeMap<i64, Vec<SeccompRule>>, errno: i32) -> Result<BpfProgram, BackendError> {
    let refuse = SeccompAction::Errno(errno as u32);
    let architecture = std::env::consts::ARCH.try_into()?;
    SeccompFilter::new(rules, SeccompAction::Allow, refuse, architecture)?.try_into()
}

/// x32 calls share the architecture but not the numbers, and the compiler does not know them: a program
/// of four instructions refuses every number with their bit.
fn refuse_x32() -> BpfProgram {
    const LOAD_WORD: u16 = 0x20;
    const JUMP_IF_GREATER_OR_EQUAL: u16 = 0x35;
    const RETURN: u16 = 0x06;
    const X32_BIT: u32 = 0x4000_0000;
    const ALLOW: u32 = 0x7fff_0000;
    const ERRNO: u32 = 0x0005_0000;
    let step = |code, jt, jf, k| sock_filter { code, jt, jf, k };
    vec![
        step(LOAD_WORD, 0, 0, 0),
        step(JUMP_IF_GREATER_OR_EQUAL, 0, 1, X32_BIT),
        step(RETURN, 0, 0, ERRNO | libc::ENOSYS as u32),
        step(RETURN, 0, 0, ALLOW),
    ]
}
