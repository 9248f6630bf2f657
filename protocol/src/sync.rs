//! The atomics of the rings: std's, or loom's under `--cfg loom`.
//!
//! Every atomic operation of the rings goes through this file, so that loom sees all of them. Each place where an
//! ordering or a fence matters has a name, a [`Site`]. In a normal build a site costs nothing; in a loom build a model can
//! take the ordering at one site away and must then fail, which proves that the model would notice and that the
//! ordering is needed.

#[cfg(loom)]
pub use loom::sync::atomic::{AtomicU32, AtomicU64, fence};
#[cfg(not(loom))]
pub use std::sync::atomic::{AtomicU32, AtomicU64, fence};

pub use std::sync::atomic::Ordering;

/// A place in the rings where an ordering carries meaning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Site {
    /// The producer's store of the tail: Release, so that the slots are visible before it. Pairs with `TailAcquire`.
    TailRelease = 1,
    /// The consumer's fence after it loaded the tail: Acquire. Pairs with `TailRelease`.
    TailAcquire = 2,
    /// The consumer's store of the head: Release, so that its reads are over before it. Pairs with `HeadAcquire`.
    HeadRelease = 3,
    /// The producer's fence after it loaded the head: Acquire. Pairs with `HeadRelease`.
    HeadAcquire = 4,
    /// The publisher's full fence between its store of the tail and its load of the wake request.
    PublisherFence = 5,
    /// The parker's full fence between its store of the wake request and its load of the tail.
    ParkerFence = 6,
}

/// The ordering of a Release store at `site`.
#[inline(always)]
pub(crate) fn release_at(site: Site) -> Ordering {
    if weakened::is(site) { Ordering::Relaxed } else { Ordering::Release }
}

/// A fence of `order` at `site`.
#[inline(always)]
pub(crate) fn fence_at(site: Site, order: Ordering) {
    if !weakened::is(site) {
        fence(order);
    }
}

#[cfg(not(loom))]
mod weakened {
    #[inline(always)]
    pub(super) fn is(_: super::Site) -> bool {
        false
    }
}

/// Which site a model has taken away; 0 for none. A plain std atomic: loom must not see it.
#[cfg(loom)]
pub(crate) mod weakened {
    use super::Site;
    use std::sync::atomic::{AtomicU32, Ordering};

    static SITE: AtomicU32 = AtomicU32::new(0);

    pub(crate) fn is(site: Site) -> bool {
        SITE.load(Ordering::Relaxed) == site as u32
    }

    pub(crate) fn set(site: Option<Site>) {
        SITE.store(site.map_or(0, |s| s as u32), Ordering::Relaxed);
    }
}
