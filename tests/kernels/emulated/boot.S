/* From the 32 bits in which a boot loader starts a kernel to run() in 64, with every vector and tile register on. */
    .set MAGIC, 0x1BADB002
    .set FLAGS, 0x00010003             /* the addresses below are valid */
    .section .boot, "ax"
    .code32
    .balign 4
header:
    .long MAGIC, FLAGS, -(MAGIC + FLAGS)
    .long header, image_begin, image_end, bss_end, entry
    .globl entry
entry:
    cli
    mov $stack_top, %esp
    mov $directory, %edi               /* the first GiB, in pages of 2 MiB */
    mov $0x83, %eax
    mov $512, %ecx
1:  mov %eax, (%edi)
    movl $0, 4(%edi)
    add $0x200000, %eax
    add $8, %edi
    loop 1b
    movl $directory + 3, directories
    movl $directories + 3, root
    mov $root, %eax
    mov %eax, %cr3
    mov %cr4, %eax
    or $0x40620, %eax                  /* PAE, OSFXSR, OSXMMEXCPT, OSXSAVE */
    mov %eax, %cr4
    mov $0xC0000080, %ecx              /* EFER */
    rdmsr
    or $0x100, %eax                    /* LME */
    wrmsr
    mov %cr0, %eax
    and $0xFFFFFFF3, %eax              /* EM, TS */
    or $0x80000023, %eax               /* PG, NE, MP, PE */
    mov %eax, %cr0
    lgdt gdt_pointer
    ljmp $8, $long_mode

    .code64
long_mode:
    mov $16, %eax
    mov %eax, %ds
    mov %eax, %es
    mov %eax, %ss
    mov $stack_top, %rsp
    lidt idt_pointer
    mov $0xC0000100, %ecx              /* FS_BASE: thread-local variables lie below it */
    mov $thread, %eax
    xor %edx, %edx
    wrmsr
    movq $thread, thread
    xor %ecx, %ecx
    mov $0x602e7, %eax                 /* XCR0: SSE, AVX, AVX-512, protection keys, tiles */
    xor %edx, %edx
    xsetbv
    xor %ebp, %ebp
    call run
2:  hlt
    jmp 2b

    .data
    .balign 8
gdt: .quad 0, 0x00AF9A000000FFFF, 0x00CF92000000FFFF
gdt_pointer: .word 23
    .long gdt
idt_pointer: .word 0                   /* none: any exception ends the run */
    .quad 0

    .bss
    .balign 4096
root: .skip 4096
directories: .skip 4096
directory: .skip 4096
    .skip 4096
thread: .skip 64
    .balign 64
    .skip 16 << 20
stack_top:
    .skip 64
    .section .note.GNU-stack, "", @progbits
