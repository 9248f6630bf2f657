//! A step needs no system call: every one that any thread makes is trapped and counted.
//!
//! A filter (seccomp) sends each call to a handler, which counts it and makes it from an address that the filter lets pass.
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

mod common;

use common::Model;
use llmd_kernels::cpu::{CpuOptions, Isa};
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

static COUNTS: [AtomicU32; 512] = [const { AtomicU32::new(0) }; 512];
static COUNTING: AtomicBool = AtomicBool::new(false);

std::arch::global_asm!(
    ".globl llmd_test_syscall",
    ".globl llmd_test_syscall_end",
    // (number, pointer to six arguments) -> result
    "llmd_test_syscall:",
    "mov rax, rdi",
    "mov r11, rsi",
    "mov rdi, [r11]",
    "mov rsi, [r11 + 8]",
    "mov rdx, [r11 + 16]",
    "mov r10, [r11 + 24]",
    "mov r8, [r11 + 32]",
    "mov r9, [r11 + 40]",
    "syscall",
    "llmd_test_syscall_end:",
    "ret",
);

unsafe extern "C" {
    fn llmd_test_syscall(number: i64, arguments: *const i64) -> i64;
    fn llmd_test_syscall_end();
}

extern "C" fn count(_signal: i32, _info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: a handler with SA_SIGINFO gets a ucontext; the registers hold a system call that was not made yet.
    unsafe {
        let registers = &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs;
        let of = |register: i32| registers[register as usize];
        let number = of(libc::REG_RAX);
        if COUNTING.load(Ordering::Relaxed) {
            COUNTS[number as usize % COUNTS.len()].fetch_add(1, Ordering::Relaxed);
        }
        let arguments =
            [libc::REG_RDI, libc::REG_RSI, libc::REG_RDX, libc::REG_R10, libc::REG_R8, libc::REG_R9].map(of);
        registers[libc::REG_RAX as usize] = llmd_test_syscall(number, arguments.as_ptr());
    }
}

/// Sends all calls of all threads to [`count`], for the rest of the process.
fn trap_all() {
    let load = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    let is_equal = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    let end = (libc::BPF_RET | libc::BPF_K) as u16;
    let line = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    let address = llmd_test_syscall_end as *const () as u64;
    // Offsets into seccomp_data: the number at 0, the address of the instruction behind the call at 8.
    let mut filter = [
        line(load, 0, 0, 0),
        line(is_equal, 5, 0, libc::SYS_rt_sigreturn as u32),
        line(load, 0, 0, 8),
        line(is_equal, 0, 2, address as u32),
        line(load, 0, 0, 12),
        line(is_equal, 1, 0, (address >> 32) as u32),
        line(end, 0, 0, libc::SECCOMP_RET_TRAP),
        line(end, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: plain system calls with arguments that outlive them; the handler only uses what is safe in a handler.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = count as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_NODEFER;
        assert_eq!(libc::sigaction(libc::SIGSYS, &action, std::ptr::null_mut()), 0);
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        let result =
            libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, libc::SECCOMP_FILTER_FLAG_TSYNC, &program);
        assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
    }
}

/// Calls since the last time: those of waiting (they depend on who else wants the processors), and all others.
fn take() -> (u32, Vec<(usize, u32)>) {
    let (mut waiting, mut others) = (0, Vec::new());
    for (number, count) in COUNTS.iter().enumerate() {
        match (number as i64, count.swap(0, Ordering::Relaxed)) {
            (_, 0) => {}
            (libc::SYS_futex | libc::SYS_sched_yield, count) => waiting += count,
            (_, count) => others.push((number, count)),
        }
    }
    (waiting, others)
}

#[test]
fn a_step_makes_no_system_call() {
    let mut models: Vec<_> = Isa::available()
        .map(|isa| (isa, Model::new(CpuOptions { threads: Some(2), isa: Some(isa), ..CpuOptions::default() })))
        .collect();
    for (_, model) in &mut models {
        model.step(true);
    }
    trap_all();
    // The counter counts.
    COUNTING.store(true, Ordering::Relaxed);
    // SAFETY: harmless.
    unsafe { libc::getppid() };
    assert_eq!(take(), (0, vec![(libc::SYS_getppid as usize, 1)]));

    for (isa, model) in &mut models {
        let (mut quiet, mut all) = (0, 0);
        for step in 0..2000 {
            COUNTING.store(true, Ordering::Relaxed);
            model.step(step % 10 == 0);
            COUNTING.store(false, Ordering::Relaxed);
            let (waiting, others) = take();
            assert_eq!(others, [], "{isa}: (number, how often) in step {step}");
            (quiet, all) = (quiet + u32::from(waiting == 0), all + 1);
            if quiet == 100 {
                break;
            }
        }
        println!("{isa}: {quiet} of {all} steps without any system call");
        // On a host where others want the processors, threads yield to them; a call that belongs to a step is in every one.
        assert!(quiet > 0, "{isa}: every one of {all} steps made a system call");
    }
}
