//! Decoding a control frame never asks for more memory at once than the frame's limit, whatever lengths it claims.

use llmd_protocol::control::{ANSWER_BYTES_MAX, ControlAnswer, decode};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

struct Largest;
static LARGEST: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Largest {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Largest = Largest;

#[test]
fn lengths_in_a_frame_are_not_believed() {
    // 64 bytes that say: an answer of each kind, with every field, string and list as long as can be written down.
    for kind in 0..4u32 {
        for fill in [0xff_u8, 0x7f, 0x01, 0x20] {
            let mut body = vec![fill; 64];
            body[..4].copy_from_slice(&kind.to_le_bytes());
            LARGEST.store(0, Ordering::Relaxed);
            assert!(decode::<ControlAnswer>(&body, ANSWER_BYTES_MAX).is_err());
            let largest = LARGEST.load(Ordering::Relaxed);
            assert!(largest <= ANSWER_BYTES_MAX as usize, "kind {kind}, fill {fill}: {largest} bytes at once");
        }
    }
}
