//! Random tables over a small cache; what each block holds is remembered beside it.

use super::block::{BLOCK_TOKENS, BlockId};
use super::{Holder, KvCache, KvUsage};
use proptest::prelude::*;

const BLOCKS: usize = 12;
const TABLES: usize = 4;

#[derive(Debug, Clone)]
enum Step {
    /// Lets go of what the table had and begins anew: blocks of equal tokens, so that paths meet often.
    Begin {
        table: usize,
        salt: u64,
        blocks: Vec<u32>,
        more: usize,
    },
    /// Computes so many more tokens of it.
    Compute {
        table: usize,
        tokens: usize,
    },
    Release {
        table: usize,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let table = 0..TABLES;
    prop_oneof![
        (table.clone(), 0..2u64, prop::collection::vec(0..2u32, 0..5), 1..BLOCK_TOKENS)
            .prop_map(|(table, salt, blocks, more)| Step::Begin { table, salt, blocks, more }),
        (table.clone(), 1..40usize).prop_map(|(table, tokens)| Step::Compute { table, tokens }),
        table.prop_map(|table| Step::Release { table }),
    ]
}

#[derive(Debug, Default)]
struct Table {
    salt: u64,
    tokens: Vec<u32>,
    computed: usize,
    blocks: Vec<BlockId>,
}

struct World {
    cache: KvCache,
    tables: Vec<Table>,
    /// Salt and path of what was written last into each block, up to its end.
    written: Vec<(u64, Vec<u32>)>,
}

impl World {
    fn apply(&mut self, step: &Step) {
        match *step {
            Step::Begin { table, salt, ref blocks, more } => {
                let table = &mut self.tables[table];
                self.cache.release(&mut table.blocks);
                let whole = blocks.iter().flat_map(|&b| [b; BLOCK_TOKENS]);
                let tokens: Vec<_> = whole.chain(std::iter::repeat_n(9, more)).collect();
                *table = Table { salt, tokens, ..Table::default() };
                let mut found = Vec::new();
                self.cache.find(salt, &table.tokens, &mut found);
                for (i, block) in found.iter().enumerate() {
                    let path = &table.tokens[..(i + 1) * BLOCK_TOKENS];
                    assert_eq!(self.written[block.index()], (salt, path.to_vec()), "a hit on other content");
                }
                self.cache.hold(&found, &mut table.blocks);
                table.computed = found.len() * BLOCK_TOKENS;
                let available = self.cache.available();
                let before = table.blocks.clone();
                let fits = self.cache.extend(&mut table.blocks, table.tokens.len());
                assert_eq!(fits, blocks.len() + 1 - found.len() <= available);
                if !fits {
                    assert_eq!(table.blocks, before, "half of what was asked for");
                    self.cache.release(&mut table.blocks);
                    table.computed = 0;
                }
            }
            Step::Compute { table, tokens } => {
                let table = &mut self.tables[table];
                if table.blocks.is_empty() {
                    return;
                }
                let start = table.computed;
                table.computed = (start + tokens).min(table.tokens.len());
                for position in start..table.computed {
                    let path = (table.salt, table.tokens[..=position].to_vec());
                    self.written[table.blocks[position / BLOCK_TOKENS].index()] = path;
                }
                let filled = start / BLOCK_TOKENS..table.computed / BLOCK_TOKENS;
                self.cache.publish(table.salt, &table.tokens, &mut table.blocks, filled);
            }
            Step::Release { table } => {
                self.cache.release(&mut self.tables[table].blocks);
                self.tables[table].computed = 0;
            }
        }
    }

    fn check(&self) {
        let holders: Vec<_> = self
            .tables
            .iter()
            .map(|t| Holder { salt: t.salt, tokens: &t.tokens, computed: t.computed, table: &t.blocks })
            .collect();
        self.cache.check_integrity(&holders).unwrap();
        for t in &self.tables {
            for position in 0..t.computed {
                let (salt, path) = &self.written[t.blocks[position / BLOCK_TOKENS].index()];
                assert_eq!(*salt, t.salt, "a block of another salt");
                assert!(path.starts_with(&t.tokens[..=position]), "a block was written over");
            }
        }
    }
}

proptest! {
    #[test]
    fn every_table_keeps_what_it_computed(
        steps in prop::collection::vec(step(), 1..80),
        prefix_cache in prop::bool::weighted(0.8),
    ) {
        let mut world = World {
            cache: KvCache::new(BLOCKS, prefix_cache),
            tables: (0..TABLES).map(|_| Table::default()).collect(),
            written: vec![(0, Vec::new()); BLOCKS],
        };
        for step in &steps {
            world.apply(step);
            world.check();
        }
        for table in &mut world.tables {
            world.cache.release(&mut table.blocks);
            table.computed = 0;
        }
        world.check();
        let KvUsage { total, free, cached, owned } = world.cache.usage();
        prop_assert_eq!((owned, free + cached), (0, total));
        prop_assert!(prefix_cache || cached == 0);
    }
}

/// Computes `tokens` into a new table, and publishes it.
fn computed(cache: &mut KvCache, salt: u64, tokens: &[u32]) -> Vec<BlockId> {
    let mut table = Vec::new();
    assert!(cache.extend(&mut table, tokens.len()));
    cache.publish(salt, tokens, &mut table, 0..tokens.len() / BLOCK_TOKENS);
    table
}

#[test]
fn the_same_content_computed_twice_is_kept_once() {
    let tokens: Vec<u32> = (0..40).collect();
    let mut cache = KvCache::new(8, true);
    let first = computed(&mut cache, 0, &tokens);
    let second = computed(&mut cache, 0, &tokens);
    assert_eq!(first[..2], second[..2]);
    assert_ne!(first[2], second[2], "the unfilled ones stay apart");
    assert_eq!(cache.usage(), KvUsage { total: 8, free: 4, cached: 0, owned: 4 });
}

#[test]
fn a_check_sees_what_is_wrong() {
    let tokens: Vec<u32> = (0..40).collect();
    let mut cache = KvCache::new(8, true);
    let table = computed(&mut cache, 3, &tokens);
    let holder = Holder { salt: 3, tokens: &tokens, computed: 40, table: &table };
    assert_eq!(cache.check_integrity(&[holder]), Ok(()));
    let fault = |holders: &[Holder<'_>]| cache.check_integrity(holders).unwrap_err().0;
    assert!(fault(&[]).contains("holders"), "a leak");
    assert!(fault(&[holder, holder]).contains("holders"), "shared without being counted");
    assert!(fault(&[Holder { salt: 4, ..holder }]).contains("another path or salt"));
    let others: Vec<u32> = (1..41).collect();
    assert!(fault(&[Holder { tokens: &others, ..holder }]).contains("other tokens"));
    assert!(fault(&[Holder { computed: 20, ..holder }]).contains("can be written"));
}

#[test]
fn what_is_missing_is_not_taken_by_halves() {
    let mut cache = KvCache::new(3, true);
    let mut table = Vec::new();
    assert!(!cache.extend(&mut table, 49));
    assert!(table.is_empty());
    assert!(cache.extend(&mut table, 48));
    assert_eq!(cache.available(), 0);
}

#[test]
fn switched_off_it_keeps_nothing() {
    let tokens: Vec<u32> = (0..40).collect();
    let mut cache = KvCache::new(8, false);
    let mut table = computed(&mut cache, 0, &tokens);
    cache.release(&mut table);
    let mut found = Vec::new();
    cache.find(0, &tokens, &mut found);
    assert!(found.is_empty());
    assert_eq!(cache.usage(), KvUsage { total: 8, free: 8, cached: 0, owned: 0 });
}
