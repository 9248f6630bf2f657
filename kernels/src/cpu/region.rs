//! Memory that is allocated once, zeroed, and kept: mapped straight from the kernel, so that refusal is an error rather
//! than an abort, aligned to a page, and in huge pages where the host has them.

use super::CpuError;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// Element types for which every bit pattern, zero among them, is a value.
///
/// # Safety
/// Implemented only for such types, without padding or a destructor, and aligned to no more than a page.
pub(crate) unsafe trait Plain: Copy + Send + Sync + 'static {}
// SAFETY: integers and floats of fixed width.
unsafe impl Plain for u8 {}
// SAFETY: as above.
unsafe impl Plain for i8 {}
// SAFETY: as above.
unsafe impl Plain for i32 {}
// SAFETY: as above.
unsafe impl Plain for f32 {}

const PAGE_BYTES: usize = 4096;
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// A fixed number of elements in memory of their own. Derefs to a slice.
pub(crate) struct Region<T: Plain> {
    ptr: NonNull<T>,
    len: usize,
    /// What was mapped, which may begin before `ptr`; null and 0 for an empty region.
    base: *mut libc::c_void,
    mapped_bytes: usize,
}

// SAFETY: the region owns its mapping, and T is Send + Sync.
unsafe impl<T: Plain> Send for Region<T> {}
// SAFETY: as above; shared references only read, but for the disjoint writes of kernels through `as_ptr`.
unsafe impl<T: Plain> Sync for Region<T> {}

impl<T: Plain> Region<T> {
    /// `len` zeros for `what`. Pages are taken at once, so that no step meets a page fault.
    pub(crate) fn new(what: &'static str, len: usize) -> Result<Self, CpuError> {
        if len == 0 {
            return Ok(Self { ptr: NonNull::dangling(), len, base: std::ptr::null_mut(), mapped_bytes: 0 });
        }
        let bytes = len.checked_mul(size_of::<T>()).filter(|&bytes| bytes <= isize::MAX as usize / 2);
        let bytes = bytes.ok_or(CpuError::OutOfMemory { what, bytes: usize::MAX })?;
        let align = if bytes >= HUGE_PAGE_BYTES { HUGE_PAGE_BYTES } else { PAGE_BYTES };
        let used_bytes = bytes.next_multiple_of(PAGE_BYTES);
        let mapped_bytes = used_bytes + (align - PAGE_BYTES);
        // SAFETY: a fresh anonymous mapping at an address of the kernel's choice touches nothing that exists.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                mapped_bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(CpuError::OutOfMemory { what, bytes });
        }
        let start = base.cast::<u8>().map_addr(|address| address.next_multiple_of(align));
        let region = Self { ptr: NonNull::new(start.cast()).expect("mmap gave an address"), len, base, mapped_bytes };
        if align == HUGE_PAGE_BYTES {
            // SAFETY: advice about pages of our own mapping; refusal is harmless.
            unsafe { libc::madvise(start.cast(), used_bytes, libc::MADV_HUGEPAGE) };
        }
        // SAFETY: as above. Kernels before 5.14 don't know this advice (EINVAL); then pages come at first touch.
        let populated = unsafe { libc::madvise(start.cast(), used_bytes, libc::MADV_POPULATE_WRITE) };
        if populated != 0 && std::io::Error::last_os_error().raw_os_error() == Some(libc::ENOMEM) {
            return Err(CpuError::OutOfMemory { what, bytes });
        }
        Ok(region)
    }

    /// The first element. Unlike a pointer made from a slice it may be written through while `&self` is shared; whoever
    /// does so sees to it that nobody else touches what it writes.
    pub(crate) fn as_ptr(&self) -> *mut T {
        self.ptr.as_ptr()
    }
}

/// Locks all memory that the process has mapped by now: it is never swapped out.
pub fn lock_memory() -> std::io::Result<()> {
    // SAFETY: concerns where pages are kept, not what is in them.
    if unsafe { libc::mlockall(libc::MCL_CURRENT) } == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

impl<T: Plain> Drop for Region<T> {
    fn drop(&mut self) {
        if self.mapped_bytes > 0 {
            // SAFETY: `base` and `mapped_bytes` are exactly what mmap gave, and the region is its only owner.
            unsafe { libc::munmap(self.base, self.mapped_bytes) };
        }
    }
}

impl<T: Plain> Deref for Region<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        // SAFETY: `len` elements were mapped and zeroed, and T takes any bit pattern.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.len) }
    }
}

impl<T: Plain> DerefMut for Region<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`, and `&mut self` is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeroed_and_aligned() {
        let mut region = Region::<f32>::new("test", 3 << 20).expect("12 MB");
        assert_eq!(region.as_ptr() as usize % HUGE_PAGE_BYTES, 0);
        assert!(region.iter().all(|&x| x == 0.0));
        region[3 << 19] = 1.0;
        assert_eq!(Region::<u8>::new("test", 0).expect("nothing").len(), 0);
    }

    #[test]
    fn what_cannot_be_had_is_an_error() {
        for len in [usize::MAX, isize::MAX as usize / 8, 1 << 46] {
            let got = Region::<f32>::new("too much", len);
            assert!(matches!(got, Err(CpuError::OutOfMemory { what: "too much", .. })), "{len}");
        }
    }
}
